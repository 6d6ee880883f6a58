"""Does a verification of n rows give the bits of one row? Asked of any engine; and where two texts fork.

    logits.RowEngine .. -> same_bits.Tally, a width each -> same_bits.groups -> same_bits.run -> a report

Greedy speculation writes plain decoding's text if the logits of a row do not depend on how many rows are computed with
it. An engine whose do writes another text as soon as two tokens are about equally likely.
"""
