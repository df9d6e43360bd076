"""Objectives that follow the policy gradient, about one file each: what a token's advantage and ratio make of it."""
