"""From the command line, files and the environment to one checked experiment."""
