"""The images in README and docs, from real runs; `make screenshots` creates all of them."""
