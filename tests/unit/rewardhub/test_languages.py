"""The language of a text: one passage in each language, and texts without a language."""

from __future__ import annotations

import pytest

from rewardhub.rewards.constraints.languages import (
    LANGUAGES,
    find_language,
    is_english,
    language_code,
)

PASSAGES = {
    "ar": "ذهبت إلى السوق في الصباح ثم عدت إلى البيت مع صديقي الذي كان في المدينة.",
    "bg": "Вчера отидох на пазара и си купих хляб, защото вкъщи нямаше какво да се яде.",
    "bn": "আমি সকালে বাজারে গিয়েছিলাম এবং কিছু রুটি কিনেছিলাম।",
    "de": "Am Morgen ging ich auf den Markt und kaufte Brot, weil wir zu Hause nichts mehr hatten.",
    "el": "Το πρωί πήγα στην αγορά και αγόρασα ψωμί.",
    "en": "In the morning I went to the market and bought bread because we had none at home.",
    "es": "Por la mañana fui al mercado y compré pan porque en casa no había nada para comer.",
    "fa": "صبح به بازار رفتم و نان خریدم، زیرا در خانه چیزی برای خوردن نبود.",
    "fi": "Aamulla menin torille ja ostin leipää, koska kotona ei ollut mitään syötävää.",
    "fr": "Le matin je suis allé au marché et j'ai acheté du pain, car il n'y en avait plus.",
    "gu": "હું સવારે બજારમાં ગયો અને રોટલી ખરીદી.",
    "he": "בבוקר הלכתי לשוק וקניתי לחם כי לא היה בבית.",
    "hi": "सुबह मैं बाज़ार गया और रोटी खरीदी क्योंकि घर में कुछ नहीं था।",
    "id": "Pada pagi hari saya pergi ke pasar dan membeli roti karena di rumah tidak ada.",
    "it": "La mattina sono andato al mercato e ho comprato il pane perché a casa non c'era più.",
    "ja": "朝、市場に行ってパンを買いました。家には何もなかったからです。",
    "kn": "ನಾನು ಬೆಳಿಗ್ಗೆ ಮಾರುಕಟ್ಟೆಗೆ ಹೋದೆ ಮತ್ತು ಬ್ರೆಡ್ ಖರೀದಿಸಿದೆ.",
    "ko": "아침에 시장에 가서 빵을 샀습니다. 집에 아무것도 없었기 때문입니다.",
    "ml": "ഞാൻ രാവിലെ ചന്തയിൽ പോയി റൊട്ടി വാങ്ങി.",
    "mr": "सकाळी मी बाजारात गेलो आणि भाकरी विकत घेतली कारण घरी काही नव्हते.",
    "ne": "बिहान म बजार गएँ र रोटी किनें किनभने घरमा केही पनि थिएन।",
    "nl": "In de ochtend ging ik naar de markt en kocht ik brood, want er was thuis niets meer.",
    "pa": "ਮੈਂ ਸਵੇਰੇ ਬਜ਼ਾਰ ਗਿਆ ਅਤੇ ਰੋਟੀ ਖਰੀਦੀ।",
    "pl": "Rano poszedłem na targ i kupiłem chleb, bo w domu nie było już nic do jedzenia.",
    "pt": "De manhã fui ao mercado e comprei pão, porque em casa não havia mais nada para comer.",
    "ru": "Утром я пошёл на рынок и купил хлеб, потому что дома не было ничего.",
    "sv": "På morgonen gick jag till torget och köpte bröd, för det fanns inte något hemma.",
    "sw": "Asubuhi nilikwenda sokoni na kununua mkate kwa sababu nyumbani hapakuwa na chakula.",
    "ta": "நான் காலையில் சந்தைக்குச் சென்று ரொட்டி வாங்கினேன்.",
    "te": "నేను ఉదయం మార్కెట్‌కు వెళ్లి రొట్టె కొన్నాను.",
    "th": "ตอนเช้าฉันไปตลาดและซื้อขนมปัง",
    "tr": "Sabah pazara gittim ve ekmek aldım, çünkü evde yiyecek bir şey yoktu.",
    "uk": "Вранці я пішов на ринок і купив хліб, бо вдома не було нічого.",
    "ur": "صبح میں بازار گیا اور روٹی خریدی کیونکہ گھر میں کچھ نہیں تھا۔",
    "vi": "Buổi sáng tôi đi chợ và mua bánh mì vì ở nhà không có gì để ăn.",
    "zh": "早上我去市场买了面包，因为家里什么都没有了。",
}


def test_every_language_has_a_passage() -> None:
    assert set(PASSAGES) == set(LANGUAGES)


@pytest.mark.parametrize("code", sorted(PASSAGES))
def test_passage(code: str) -> None:
    assert find_language(PASSAGES[code]) == code
    assert find_language(PASSAGES[code].upper()) == code


@pytest.mark.parametrize(
    "text", ["", "12345", "xyz qrs tuv", "Hello world", "de la en", f"hello {'привет ' * 2}"]
)
def test_text_without_language(text: str) -> None:
    assert find_language(text) == ""


def test_japanese_with_few_kana() -> None:
    # three kana and seven Chinese characters
    assert find_language("東京都知事は辞任した") == "ja"


def test_names_of_another_script_are_allowed() -> None:
    assert find_language(PASSAGES["hi"] + " (GitHub)") == "hi"
    assert find_language(PASSAGES["en"] + " 東京 and Кремль") == "en"


def test_short_latin_text_can_be_english() -> None:
    assert is_english("HELLO WORLD")
    assert not is_english("ПРИВЕТ")
    assert not is_english(PASSAGES["fr"])
    assert not is_english("123")


def test_language_names_and_codes() -> None:
    assert (language_code("Hindi"), language_code("hi"), language_code(" EN ")) == (
        "hi",
        "hi",
        "en",
    )
    with pytest.raises(ValueError, match="expected one of ar, bg, bn, de"):
        language_code("Klingon")
