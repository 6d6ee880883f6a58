"""Names and files of models: the catalogue, the Hub, conversion."""
