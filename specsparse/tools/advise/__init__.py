"""`specsparse advise`: should I speculate at all?"""
