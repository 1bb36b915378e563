module run

go 1.19
