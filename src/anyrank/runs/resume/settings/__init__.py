"""Settings that the script gives otherwise than the saved run."""
