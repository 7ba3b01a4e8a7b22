"""Forward learning inside other libraries: the Trainer of transformers, and adapters of PEFT."""
