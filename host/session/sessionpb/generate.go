// Package sessionpb holds the messages of the peer session, generated from
// session.proto. Package host/session says what they mean.
package sessionpb

//go:generate protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative session.proto
