"""A classifier for OpenVINO or ONNX Runtime."""
