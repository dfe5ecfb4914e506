"""Speed, measured beside peers in one run and told as ratios."""
