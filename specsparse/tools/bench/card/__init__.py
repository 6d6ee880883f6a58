"""`bench device`: what an accelerator does, in stages that fail alone, on models made from their shapes."""
