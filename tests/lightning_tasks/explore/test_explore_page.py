"""The page of `attnswap explore` in Chromium: pointer, keys, linked models, values, hostile names, sizes."""

import copy
import shutil
import time

import pytest
import torch
from torch import nn

import attnswap
from attention_modules.analysis import attention_maps
from lightning_tasks.explore.page import explore
from tests.lightning_tasks.explore.pages import SIZE, Translator, vit
from tests.lightning_tasks.explore.test_explore import HOSTILE, near

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
ROWS = """const [model, layer, rows] = arguments;
return [0, 1, 2].map(head => [...Array(rows).keys()].map(at => explorer.row(model, layer, head, at)));"""
LAYERS = ["*.self_attn", "*.multihead_attn"]
ARROW = "document.querySelector('canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
BOXES = "return [...document.querySelectorAll('.panel, figure')].map(each => [each.scrollWidth, each.clientWidth])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra [test])")
    if BROWSER is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,1000",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page, waits until it is drawn, and finds nothing in the console and nothing loaded at the end."""

    def open_page(page):
        browser.set_window_size(1280, 1000)
        browser.get(page.save(tmp_path / "page.html").as_uri())
        browser.execute_async_script("explorer.ready.then(arguments[0], arguments[0])")
        return browser

    yield open_page
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert browser.get_log("browser") == []
    assert not browser.execute_script("return document.getElementById('problem').textContent")


@pytest.fixture(scope="module")
def swapped():
    model = vit()
    attnswap.swap_attention(model, "symmetric")
    return model


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def linked(opened, swapped, images):
    return opened(explore({"softmax": vit(), "symmetric": swapped}, images))


def point(browser, node, across, down, click=False):
    """Move the pointer to a place in a node, in shares of its width and height."""
    from selenium.webdriver import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", node)
    size = node.size
    chain = ActionChains(browser).move_to_element_with_offset(
        node, round((across - 0.5) * size["width"]), round((down - 0.5) * size["height"])
    )
    (chain.click() if click else chain).perform()
    drawn(browser)


def drawn(browser):
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def texts(browser, selector):
    return [node.get_attribute("textContent") for node in browser.find_elements("css selector", selector)]


def nodes(browser, selector):
    return browser.find_elements("css selector", selector)


def test_values_are_those_of_attention_maps(linked, swapped, images):
    linked.execute_async_script("explorer.show(1).then(arguments[0])")
    for number, model in enumerate((vit(), swapped)):
        for layer, wanted in enumerate(attention_maps(model, images).values()):
            near(torch.tensor(linked.execute_script(ROWS, number, layer, 17)), wanted[1])
    first, second = (linked.execute_script("return explorer.row(arguments[0], 1, 2, 5)[7]", at) for at in (0, 1))
    assert linked.execute_script("return explorer.row(2, 1, 2, 5)[7]") == pytest.approx(second - first, abs=1e-6)


def test_a_pointer_over_a_patch_marks_it_in_every_model(linked):
    assert texts(linked, ".panel h2") == ["softmax", "symmetric", "symmetric − softmax"]
    canvases = nodes(linked, "figure canvas")
    point(linked, canvases[2], 0.9, 0.1)  # what the marked patch attends to, of the second model
    assert set(texts(linked, ".views figcaption")) == {"patch 0,3 attends to", "patch 0,3 is attended by"}
    tops = texts(linked, ".top")
    point(linked, canvases[0], 0.1, 0.9, click=True)
    assert set(texts(linked, ".views figcaption")) == {"patch 3,0 attends to", "patch 3,0 is attended by"}
    assert all(one != other for one, other in zip(tops, texts(linked, ".top"), strict=True))
    point(linked, canvases[0], 0.9, 0.9)  # a click holds it
    assert linked.execute_script("return explorer.state.query") == 13
    nodes(linked, "#inputs button")[1].click()
    drawn(linked)
    assert linked.execute_script("return [explorer.state.query, explorer.state.input]") == [13, 1]


def test_keys_choose_heads_and_tokens(linked):
    from selenium.webdriver import Keys

    grid = nodes(linked, "canvas[role=application]")[0]
    grid.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    drawn(linked)
    assert linked.execute_script("return [explorer.state.layer, explorer.state.head]") == [1, 2]
    assert all("layer 1 (blocks.1.attn), head 2" in text for text in texts(linked, ".caption"))
    grid.send_keys(Keys.ARROW_DOWN)
    drawn(linked)
    assert "mean of heads" in texts(linked, ".caption")[0]
    grid.send_keys(Keys.ARROW_DOWN)
    drawn(linked)
    assert "rollout" in texts(linked, ".caption")[0]
    canvas = nodes(linked, "figure canvas")[0]
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    drawn(linked)
    assert linked.execute_script("return explorer.state.query") == 5
    canvas.send_keys(Keys.ESCAPE)
    point(linked, canvas, 0.1, 0.1)
    assert linked.execute_script("return explorer.state.query") == 1


def test_a_click_in_the_grid_and_the_table_choose(linked):
    cell = linked.execute_script("return explorer.panels[1].cell")
    grid = nodes(linked, "canvas[role=application]")[1]
    point(linked, grid, (50 + 1.5 * cell) / grid.size["width"], 0.5 * cell / grid.size["height"], click=True)
    assert linked.execute_script("return [explorer.state.layer, explorer.state.head]") == [1, 0]
    assert [row.get_attribute("data-place") for row in nodes(linked, "tr[data-chosen]")] == ["1 0"]
    buttons = nodes(linked, "#table thead button")
    assert [button.text for button in buttons[2:5]] == ["entropy", "sink mass", "largest logit"]
    for button, column in ((buttons[2], 3), (buttons[-1], -1)):
        button.click()
        cells = [
            [cell.text for cell in row.find_elements("css selector", "th, td")]
            for row in nodes(linked, "tbody tr[data-place]")
        ]
        values = [float(row[column - 1 if column > 0 else -1]) for row in cells]
        assert values == sorted(values, reverse=True)
        assert len(set(values)) > 1
    nodes(linked, "tbody tr[data-place]")[3].click()
    drawn(linked)
    chosen = linked.execute_script("return `${explorer.state.layer} ${explorer.state.head}`")
    assert chosen == nodes(linked, "tbody tr[data-place]")[3].get_attribute("data-place")


def test_a_link_opens_an_input_a_head_and_a_token(linked):
    linked.get(linked.current_url + "#input=1&layer=1&head=-1&token=9")
    linked.refresh()
    linked.execute_async_script("explorer.ready.then(arguments[0], arguments[0])")
    assert "layer 1 (blocks.1.attn), mean of heads" in texts(linked, ".caption")[0]
    assert linked.execute_script("const {input, query, key} = explorer.state; return [input, query, key]") == [1, 9, 9]


def test_every_kind_of_small_map_and_scale_is_drawn(linked):
    seen = set()
    for kind in ("map", "from", "to", "entropy", "sink", "logit"):
        linked.execute_script("document.getElementById('thumbs').value = arguments[0]", kind)
        for name in ("root", "shared", "root", "shared"):
            nodes(linked, f"#{name}")[0].click()
            drawn(linked)
            seen.add(linked.execute_script("return explorer.panels[0].grid.toDataURL()"))
    assert len(seen) > 15


def test_text_that_is_causal_padded_or_of_another_language(opened):
    padding = torch.arange(6).expand(1, -1) >= 4
    inputs = (torch.randn(1, 6, 16), torch.randn(1, 5, 16), padding)
    page = explore(Translator(), inputs, tokens=[list("abcde")], source_tokens=[list("uvwxyz")], layers=LAYERS)
    browser = opened(page)
    assert texts(browser, ".list .unseen") == ["y", "z"] * 2  # in both views
    lists = nodes(browser, ".list")
    point(browser, lists[0].find_elements("css selector", "span")[2], 0.5, 0.5)
    assert texts(browser, "figcaption") == ["“w” (2) attends to", "“w” (2) is attended by"]
    browser.execute_script(ARROW)
    drawn(browser)
    assert [node.text for node in lists[0].find_elements("css selector", "span")] == list("abcde")
    point(browser, lists[0].find_elements("css selector", "span")[0], 0.5, 0.5)
    assert texts(browser, ".top")[0].startswith("“a” (0) 1.00")  # the first sees itself alone
    browser.execute_script(ARROW)
    drawn(browser)
    point(browser, lists[0].find_elements("css selector", "span")[3], 0.5, 0.5)  # a key
    point(browser, lists[1].find_elements("css selector", "span")[1], 0.5, 0.5)  # a query
    assert texts(browser, "figcaption") == ["“b” (1) attends to", "“x” (3) is attended by"]


def test_a_text_of_which_some_rows_are_shown(opened):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    browser = opened(explore(layer, torch.randn(1, 300, 16), rows=[0, 100, 299]))
    point(browser, nodes(browser, ".list span")[130], 0.5, 0.5)
    captions = texts(browser, "figcaption")
    assert captions == ["token 100 attends to", "token 130 is attended by"]  # the nearest row
    assert len(nodes(browser, "figure:nth-child(2) .list span:not(.absent)")) == 3


def test_names_of_anybody_run_nothing(opened):
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    browser = opened(explore({HOSTILE: model, "b": model}, torch.randn(1, 2, 16), tokens=[[HOSTILE, "<b>"]]))
    assert browser.execute_script("return document.querySelectorAll('img, b script, svg').length") == 0
    assert texts(browser, ".panel h2")[0] == HOSTILE
    assert texts(browser, ".list span")[:2] == [HOSTILE, "<b>"]
    assert HOSTILE.split(">")[0] in browser.title


def test_a_difference_of_rounding_is_faint(opened):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.self_attn.in_proj_weight *= 1.0001
    browser = opened(explore({"a": model, "b": other}, torch.randn(1, 40, 16)))
    (low, high) = [texts(browser, f".panel:nth-child({number}) figure .bar :last-child")[0] for number in (3, 1)]
    assert float(low) == pytest.approx(float(high) / 16, rel=0.1)


@pytest.mark.parametrize("width", [800, 1280, 2560])
def test_nothing_is_wider_than_the_window(linked, width):
    linked.set_window_size(width, 1000)
    drawn(linked)
    wide = linked.execute_script("return [document.documentElement.scrollWidth, innerWidth, document.body.scrollWidth]")
    assert wide[0] <= wide[1] + 1
    boxes = linked.execute_script(BOXES)
    assert all(inside <= outside + 1 for inside, outside in boxes)


@pytest.mark.slow
def test_size_and_times_of_a_vit_and_of_4096_tokens(opened, tmp_path, capsys):
    """Printed, not asserted: a shared machine is slow at times."""
    import timm

    torch.manual_seed(0)
    tiny = timm.create_model("vit_tiny_patch16_224").eval()
    other = timm.create_model("vit_tiny_patch16_224").eval()
    attnswap.swap_attention(other, "rpc")
    long = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), 4).eval()
    pages = {
        "2 ViT-tiny, 4 images": lambda: explore({"softmax": tiny, "rpc": other}, torch.rand(4, 3, 224, 224)),
        "4,096 tokens": lambda: explore(long, torch.randn(1, 4096, 24)),
    }
    for name, make in pages.items():
        page, started = make(), time.perf_counter()
        browser = opened(page)
        took = time.perf_counter() - started
        ready = browser.execute_script("return performance.now()")
        hover = browser.execute_async_script(HOVER)
        with capsys.disabled():
            size, page_time = len(page.html) / 1e6, ready / 1000
            print(f"\n{name}: {size:.2f} MB, opened in {took:.2f} s (of the page {page_time:.2f} s), hover {hover}")


HOVER = """const done = arguments[0], view = explorer.panels[0].views[0], times = [];
const node = view.canvas.hidden ? view.list : view.canvas;
let at = 0;
const step = () => {
  const target = view.canvas.hidden ? view.list.children[(37 * at) % view.list.children.length] : view.canvas;
  const box = view.canvas.getBoundingClientRect(), began = performance.now();
  target.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
    clientX: box.left + box.width * (at % 14) / 14, clientY: box.top + box.height * (at * 5 % 14) / 14}));
  requestAnimationFrame(() => setTimeout(() => {
    times.push(performance.now() - began);
    if (++at < 40) step();
    else { times.sort((a, b) => a - b); done(`median ${times[20].toFixed(1)} ms, most ${times[39].toFixed(1)} ms`); }
  }));
};
step();"""
