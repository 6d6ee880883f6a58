"""`specsparse chat`."""
