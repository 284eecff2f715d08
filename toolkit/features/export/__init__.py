"""Export of classifiers to OpenVINO and ONNX Runtime."""
