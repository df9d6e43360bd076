"""Take what is final of a run off its file system, as one packed file or a folder, and bring it back."""
