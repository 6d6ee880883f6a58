"""From files and a command line to a checked config; Hydra and OmegaConf stop here."""
