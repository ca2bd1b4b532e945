"""The paper's evaluation: its workloads, its figures, and its numbers beside ours."""
