"""Frequent words of the languages that share a script, and letters that only one of them has."""

from __future__ import annotations

from typing import Final

_WORDS: Final = {
    "de": (
        "der die das und ist in den von zu mit sich des auf für nicht ein eine einer einen "
        "dem es im auch an als wie wird werden sind oder aber aus bei nach nur noch sie er "
        "ich wir ihr war hat haben kann dass wenn so mehr über durch dieser diese dieses zum "
        "zur man sehr ja nein"
    ),
    "en": (
        "the of and to in is it that for on with as was are be this by have from or had not "
        "but what all were when we there can an your which their said if will each about how "
        "them then she many some so these would other into has more her two like him see time "
        "could no make than been its who now my made over did down only way use may i you he "
        "they a at out up do also just very our yes any after most where because should"
    ),
    "es": (
        "el la de que y en un una los las del se por con para es lo como más pero sus le ya o "
        "este sí porque esta entre cuando muy sin sobre también me hasta hay donde quien "
        "desde todo nos durante todos uno ni contra otros ese eso ante ellos esto antes "
        "algunos qué unos yo otro su al no son está han ser tiene puede"
    ),
    "fi": (
        "ja on ei se että oli joka hän mutta niin kun ovat myös tai sen jos kuin ole voi tämä "
        "ne mitä minä sinä me te he olen siitä sitä siinä tässä joita jotka hyvin vain nyt "
        "vielä kaikki mukaan sekä jo ollut olla kanssa jälkeen ennen koska kuten tämän niiden "
        "ovatko"
    ),
    "fr": (
        "le la les de des du et est un une en que qui dans pour pas sur avec ce il elle ne se "
        "au aux par plus sont nous vous je mais ou où son sa ses leur cette ces tout comme "
        "être fait ont été même très si aussi bien peut c'est sans entre deux donc on y d'un "
        "d'une l'on n'est"
    ),
    "id": (
        "yang dan di ini itu dengan untuk dari dalam tidak akan pada adalah ke karena juga "
        "ada kami saya mereka oleh atau sebagai bisa dapat sudah telah lebih kita anda dia "
        "seperti tetapi namun saat tersebut banyak para hanya agar bahwa secara setelah "
        "menjadi"
    ),
    "it": (
        "il la di che e è un una in per non con sono da si del della dei delle al alla le lo "
        "gli i come ma più anche se questo questa ha nel nella ci mi o suo sua essere tutti "
        "tutto molto dal dalla quando perché cosa ho hanno fatto dove chi ancora sul sulla "
        "loro può"
    ),
    "nl": (
        "de het een en van in is dat op te zijn met voor niet aan er om ook als maar bij of "
        "uit nog naar dan door over wordt worden deze dit die ik je hij zij we ze was hebben "
        "heeft kan zo wat geen meer tot veel onder hun haar onze waar al wel"
    ),
    "pl": (
        "i w nie na się z do jest to że jak o po co ale za od tak przez dla są być który "
        "która które ich jego jej tym oraz może czy już tylko bardzo przy gdy mnie mi ten ta "
        "te go aby jako także był była było ma lub gdzie każdy wszystko można"
    ),
    "pt": (
        "o a de que e do da em um uma para com não os as no na se por mais dos das como mas "
        "foi ao ele ela tem à seu sua ou ser quando muito há nos já está eu também só pelo "
        "pela até isso entre era depois sem mesmo aos seus quem nas me esse eles são você "
        "pode"
    ),
    "sv": (
        "och i att det som en på är av för med den till inte om ett han hon jag vi de har var "
        "men sig så kan från eller när nu du ut under också mycket efter vid hade ska skulle "
        "alla detta denna finns bara här där vara blir sin sitt sina många"
    ),
    "sw": (
        "na ya wa kwa ni katika la za cha hii huo ili kama lakini sana yake wake pia hivyo "
        "baada watu kuwa hiyo kila mtu yangu ambayo ambao vya yao wao si hapa huu hizi mimi "
        "wewe yeye sisi hata tu kutoka zaidi bila au wakati kwamba nini moja"
    ),
    "tr": (
        "ve bir bu da de için ile çok ne o daha gibi var olarak en ama değil kadar ya ben sen "
        "biz onun her şey mi mı sonra olan oldu veya hem ki diye olduğu tüm ise bana yok iyi "
        "nasıl neden göre ancak sadece kendi"
    ),
    "vi": (
        "và của là có không được cho một những trong với các người này đã để tôi khi bạn từ "
        "đến như ra vào lại thì mà cũng nhiều về nhưng rất đó trên họ ở năm ngày làm sẽ hay "
        "phải chúng nếu bởi vì hơn theo đang mình anh cô"
    ),
    "bg": (
        "и на да се е от за в не с по са ще това че като но го към или има съм му ми му тя "
        "той те ние вие аз само още при до много може когато където който която което които "
        "ги бъде"
    ),
    "ru": (
        "и в не на я что с он как это а по но они мы все она так его за от к у ты из бы же вы "
        "для о то ее её их если только был была было были быть есть или когда уже нет да "
        "очень может чтобы который которая которые этот эта эти также мне меня"
    ),
    "uk": (
        "і в не на я що з він як це а по але вони ми всі вона так його за від до у ти із би "
        "же ви для о то її їх якщо тільки був була було були бути є або коли вже ні та дуже "
        "може щоб який яка які цей ця ці також мені мене й про"
    ),
    "ar": (
        "في من على إلى أن هذا هذه التي الذي كان لا ما هو هي مع عن كل ذلك أو كما قد لم بين بعد "
        "لكن حيث و إن كانت يمكن عند أي يكون أكثر خلال هناك نحن أنا أنت لها له منها فيها غير "
        "ثم"
    ),
    "fa": (
        "و در به از که این را با است برای آن یک خود تا کرد بر هم نیز می ها شد یا ما های اما "
        "شده باشد بود دارد کند شود هر من او آنها ای اگر همه چه بسیار باید نیست کنید شما پس"
    ),
    "ur": (
        "کے میں کی ہے اور سے کا کو اس پر کہ ہیں نے یہ ایک بھی نہیں تھا وہ جو تو کر ہو اپنے ان "
        "کیا ہی گیا لیے تھے یا تھی جا رہا کرتے ہوتا آپ ہم مجھے بہت کوئی جب ساتھ بعد ہوئے"
    ),
    "hi": (
        "के में की है और से का को इस पर कि हैं ने यह एक भी नहीं था वह जो तो "
        "कर हो अपने उन क्या ही गया लिए थे या थी जा रहा करते होता आप हम मुझे "
        "बहुत कोई जब साथ बाद हुए मैं"
    ),
    "mr": (
        "आहे आणि या च्या हे ते मध्ये नाही होते एक व तर म्हणून केले आहेत मी "
        "तो ती त्या हा ही होता होती करून पण जे की असे सर्व त्याच्या आपल्या "
        "खूप आपण किंवा काही झाले साठी असते मला"
    ),
    "ne": (
        "छ र को मा यो भएको हो छन् गर्न एक पनि लागि थियो त्यो हरू गरेको तर म "
        "भने ले लाई गर्ने थिए बाट कुनै सबै धेरै हुन्छ उनी मेरो तपाईं हामी "
        "के नै साथै तथा गर्छ जस्तै भन्ने हाम्रो"
    ),
}
FREQUENT_WORDS: Final = {language: frozenset(words.split()) for language, words in _WORDS.items()}
OWN_LETTERS: Final = {
    "ar": frozenset("ةىيك"),
    "bg": frozenset("ъ"),
    "de": frozenset("ß"),
    "es": frozenset("ñ"),
    "fa": frozenset("پچژگ"),
    "mr": frozenset("ळ"),
    "pl": frozenset("łąęśźżćń"),
    "pt": frozenset("ãõ"),
    "ru": frozenset("ыэё"),
    "sv": frozenset("å"),
    "tr": frozenset("ğı"),
    "uk": frozenset("іїєґ"),
    "ur": frozenset("ٹڈڑےںہھ"),
    "vi": frozenset("ơưđạảấầậắặẵẻẽềểễệỉịọỏốồổộớờởỡợụủứừửữựỳỵỷỹ"),
}
