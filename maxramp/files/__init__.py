"""Where files and folders lie: on a disk, or in an object storage."""
