"""The command line `remat-kit`."""
