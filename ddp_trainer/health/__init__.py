"""What ranks report about themselves while they train: their own times, their memory, and the rank that slows all."""
