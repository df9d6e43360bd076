"""The environment `rows`: data of one's own, scored by a function of one's own, without a package."""
