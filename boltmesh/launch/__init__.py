"""How the ranks of a job come to be, what they tell who started them, and how they end."""
