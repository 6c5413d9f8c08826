"""The pictures in README and docs, from real runs: `make screenshots` makes all of them anew."""
