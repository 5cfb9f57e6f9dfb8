"""Steps of portable models: recorded as torch operations when they come again, and replayed from then on."""
