"""How the ranks came to their first step: from their records to one timeline and what it tells."""
