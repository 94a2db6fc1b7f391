"""Wire contract of Moontide: protobuf schemas and the code generated from them (`make proto`)."""
