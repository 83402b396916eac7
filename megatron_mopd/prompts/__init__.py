"""Step 1, DRAW: prompt files, the seeded mixture over (domain, effort), and rendering to token ids."""
