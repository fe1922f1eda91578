"""The Hugging Face processor of the pocket models: tokenizer, picture preparation, chat template."""

from tokenizers import Tokenizer
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

from saccade.pocket.sample import IMAGE_SIZE, PATCH_SIZE
from saccade.pocket.train.chat import SPECIAL_TOKENS, TEMPLATE


def make_processor(tokenizer: Tokenizer, context: int) -> LlavaProcessor:
    """A processor whose output equals the training batches' ids and pixels.

    A picture of 96 x 96 goes through unchanged, any other is resized to that. The prompt text brings its own
    `<s>`, so the tokenizer adds none.
    """
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "image_token": "<image>",
            "user_token": "<user>",
            "assistant_token": "<assistant>",
        },
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    assert [wrapped.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(6))
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pictures = CLIPImageProcessorPil(
        size=side,
        crop_size=side,
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=wrapped,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
