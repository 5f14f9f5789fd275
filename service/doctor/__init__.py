"""`distill doctor`: where a step's time goes, what to change, and what that is predicted to gain."""
