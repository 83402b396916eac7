"""Steps 3 and 4, ROUTE and SCORE: which teacher a trajectory goes to, and the lane in which it waits for its scores."""
