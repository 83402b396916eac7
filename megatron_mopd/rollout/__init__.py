"""Step 2, SAMPLE: trajectories of the student, and the environments that answer and verify them."""
