"""Model implementations that engram can serve the tables of."""
