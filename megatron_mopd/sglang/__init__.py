"""Rollouts, teacher scores and weight sync on SGLang servers: the only place that speaks to SGLang."""
