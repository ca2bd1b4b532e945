"""The seam between deciding and computing: a StepPlan goes in, a StepResult comes out."""
