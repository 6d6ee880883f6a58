"""`specsparse bench`: this engine beside the machine and beside other engines."""
