// Runs a compiled model on ones and prints its outputs.
//
//	cp path/to/vit.h model.h && go build -o run . && ./run path/to/vit.so [SHAPE of each input, such as 4x3x224x224]
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 {
		return fmt.Errorf("usage: run MODEL.so [SHAPE ...]")
	}
	model, err := Open(arguments[0])
	if err != nil {
		return err
	}
	defer model.Close()
	var shapes [][]int64
	for _, text := range arguments[1:] {
		shape, err := shapeOf(text)
		if err != nil {
			return err
		}
		shapes = append(shapes, shape)
	}
	if len(shapes) > 0 {
		if err := model.SetShapes(shapes); err != nil {
			return err
		}
	}
	for _, input := range model.Inputs {
		for i := range input.Values {
			input.Values[i] = 1
		}
	}
	if err := model.Run(); err != nil {
		return err
	}
	for _, output := range model.Outputs {
		shown, rest := output.Values, ""
		if len(shown) > 5 {
			shown, rest = shown[:5], " ..."
		}
		fmt.Printf("%s %v = %s%s\n", output.Name, output.Shape, strings.Trim(fmt.Sprint(shown), "[]"), rest)
	}
	return nil
}

func shapeOf(text string) ([]int64, error) {
	var sizes []int64
	for _, word := range strings.Split(text, "x") {
		size, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("'%s' is no shape such as 4x3x224x224", text)
		}
		sizes = append(sizes, size)
	}
	return sizes, nil
}
