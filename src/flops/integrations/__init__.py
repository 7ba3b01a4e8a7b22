"""Forward learning inside other libraries: transformers, PEFT and ONNX Runtime."""
