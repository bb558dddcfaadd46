module example.com/rule

go 1.26.0

require github.com/tierd/tierd v0.0.0

replace github.com/tierd/tierd => ../..
