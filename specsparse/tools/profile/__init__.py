"""`specsparse profile`."""
