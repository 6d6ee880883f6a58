"""PowerInfer's files, read and written."""
