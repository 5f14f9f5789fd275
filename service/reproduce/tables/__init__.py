"""Tables of published accuracies, as data: what `distill reproduce TABLE` compares with. The format is in docs/reproduce.md."""
