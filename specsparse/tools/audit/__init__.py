"""Does a verification of n rows give the bits of one row? Asked of any engine; and where two texts fork.

    engines.RowEngine .. -> compare.Tally, a width each -> compare.groups -> job.run -> a report

Greedy speculation writes plain decoding's text where the logits of a row do not depend on how many rows are computed
with it. An engine whose do writes another text as soon as two tokens are about equally likely.
"""
