"""What ddpcheck itself costs, and which steps its budget left out."""
