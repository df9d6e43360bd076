"""Environment packages as people have them."""
