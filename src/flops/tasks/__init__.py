"""Applications: the model, the data and the measure of success of each."""
