"""Memory that ranks share."""
