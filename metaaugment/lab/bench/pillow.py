"""The same functions by Pillow, image by image: what ours are timed against and, in the tests, checked against."""

from PIL import Image, ImageEnhance, ImageOps

AFFINE = Image.Transform.AFFINE


def apply_function(
    image: Image.Image, name: str, argument: float, fill: tuple[int, ...], position: tuple[float, float] = (0.5, 0.5)
) -> Image.Image:
    """One function on one image, by the Pillow calls its users write."""
    color = fill if image.mode == "RGB" else fill[0]
    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Rotate":
            return image.rotate(argument, fillcolor=color)
        case "Posterize":
            # Pillow refuses 0 bits, which AutoAugment's and RandAugment's levels ask for: black, as in older versions.
            return ImageOps.posterize(image, int(argument)) if argument >= 1 else Image.new(image.mode, image.size)
        case "Solarize":
            return ImageOps.solarize(image, argument)  # type: ignore[arg-type]  # it only compares
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return getattr(ImageEnhance, name)(image).enhance(argument)
        case "ShearX":
            return image.transform(image.size, AFFINE, (1, argument, 0, 0, 1, 0), fillcolor=color)
        case "ShearY":
            return image.transform(image.size, AFFINE, (1, 0, 0, argument, 1, 0), fillcolor=color)
        case "TranslateX":
            return image.transform(image.size, AFFINE, (1, 0, argument, 0, 1, 0), fillcolor=color)
        case "TranslateY":
            return image.transform(image.size, AFFINE, (1, 0, 0, 0, 1, argument), fillcolor=color)
        case "Invert":
            return ImageOps.invert(image)
        case "Cutout":
            y, x = int(position[0] * image.height), int(position[1] * image.width)
            side = int(argument)
            left, top = x - side // 2, y - side // 2
            covered = image.copy()
            covered.paste(color, (max(left, 0), max(top, 0), max(left + side, 0), max(top + side, 0)))
            return covered
        case _:
            return image
