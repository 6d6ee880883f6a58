"""`bench device`: an accelerator in stages that fail alone, on models made from their shapes."""
