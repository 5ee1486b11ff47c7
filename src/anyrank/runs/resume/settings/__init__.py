"""Settings that differ between the script and the saved run."""
