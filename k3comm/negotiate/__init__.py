"""Who can do what: probe (local, never raises), vote (one collective), decide (pure), report."""
