"""A run as one HTML page that needs neither a network nor a server: `prime-hpc report`.

Reads run directories and nothing else; a run under way, half written or of another version gives the part that is
there. `page` is the entry.
"""
