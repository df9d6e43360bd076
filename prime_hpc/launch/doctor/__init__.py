"""`prime-hpc doctor`: check this machine, a shared file system or an allocation, and name a remedy for each finding."""
