"""`specsparse inspect`."""
